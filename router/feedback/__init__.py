"""Request lifecycle: first tokens, ends, and ledger changes exchanged with other routers."""
