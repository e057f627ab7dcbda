"""Chat templates: model files, Jinja environment, and rendering of chats."""
