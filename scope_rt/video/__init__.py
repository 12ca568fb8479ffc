"""Where frames and figures leave the runtime: video files, contact sheets, traces, timings."""
