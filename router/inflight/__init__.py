"""Requests that are on their way: what was dispatched, what pods are busy with, learnt rates."""
