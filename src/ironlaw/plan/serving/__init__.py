"""Plans of serving: seconds of a prompt and of a token, the number of requests that fit, and their cost."""
