"""Code that several tests share: small jobs, processes, token shards, archives."""
