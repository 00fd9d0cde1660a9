"""Token shards (`.bin` and `.idx`): format, reader, writer, several shards joined or merged."""
