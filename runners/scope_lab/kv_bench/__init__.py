"""`scripts/lab kv_bench` measures every KV-cache system by one yardstick."""
