"""Pods and pools of the Kubernetes API."""
