"""Chat templates: the files of a model, the Jinja environment, and rendered prompts."""
