"""One job of many processes: joining, agreeing, failing together, leaving with an exit code."""
