"""Request lifecycle: first tokens and ends, learned speeds, changes exchanged with other routers."""
