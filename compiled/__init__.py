"""What compiles kernels, and where it keeps them; shared by router, indexer and model server."""
