"""Turn text into training batches, by way of corpora, tokenizers, token shards and samples."""
