"""Exchange of views with other routers."""
