"""What the traffic shows operators: broken prefixes, losses before a hit, what the routing is worth."""
