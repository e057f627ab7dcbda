"""The routers of one fleet, each with a ledger of its own, and what they tell each other of it."""
