"""Event streams of engines: sockets, sequence numbers, replay, snapshots, recovery."""
