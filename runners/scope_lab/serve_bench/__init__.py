"""What viewers and recordings cost a stream that is served."""
