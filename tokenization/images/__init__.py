"""Images in prompts: number and place of each image's tokens, by model family."""
