"""Views for other routers, and theirs."""
