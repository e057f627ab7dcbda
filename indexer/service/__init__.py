"""Program `kvroute indexer`."""
