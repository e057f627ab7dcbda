"""One model in several processes: what they say to each other, and who starts and ends them."""
