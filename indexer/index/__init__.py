"""Index from blocks to pods: memory layout, holders, engine hashes, match, update."""
