"""Token shards (pairs of `.bin` and `.idx` files): format, reader, writer, joining and merging."""
