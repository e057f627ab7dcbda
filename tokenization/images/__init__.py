"""Images in prompts: how many tokens each takes, and where they stand, by model family."""
