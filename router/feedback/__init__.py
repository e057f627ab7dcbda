"""What becomes of requests: their ends, learnt speeds, and the news of other routers."""
