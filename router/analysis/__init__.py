"""Analyses of the traffic for operators: broken prefixes, losses before a hit, the worth of the routing."""
