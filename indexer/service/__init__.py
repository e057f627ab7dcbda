"""The program `kvroute indexer`."""
