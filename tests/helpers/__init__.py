"""What several tests share: small jobs, processes, shards, archives."""
