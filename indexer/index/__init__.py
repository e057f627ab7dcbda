"""Block to pods: layout, copies, names, match, update."""
