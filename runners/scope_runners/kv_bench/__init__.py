"""`scope-rt kv-bench` measures every KV-cache system by one yardstick."""
