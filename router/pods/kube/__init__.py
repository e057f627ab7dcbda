"""Discovery in Kubernetes: pods, the InferencePool, its objectives and model rewrites."""
