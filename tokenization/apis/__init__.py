"""Chat APIs: conversion of chat completions, Anthropic Messages and Responses requests to messages."""
