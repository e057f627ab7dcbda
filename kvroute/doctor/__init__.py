"""`kvroute doctor`: checks from the client to the engine, each with its remedy."""
