"""The helper as a process: its HTTPS interface, its queries and its way to the peers."""
