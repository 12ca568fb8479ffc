"""Where frames leave the runtime: video files, viewers, contact sheets."""
