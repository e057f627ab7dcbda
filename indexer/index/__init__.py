"""Index of block to pods: layout, copies, engine hashes, match, update."""
