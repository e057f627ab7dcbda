"""From a request's body to its prompt's token ids."""
