"""What this machine does: peak memory, time, the allocator."""
