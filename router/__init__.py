"""The endpoint picker: sends each LLM request to the model server that will answer it first."""
