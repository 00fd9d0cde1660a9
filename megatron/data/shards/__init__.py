"""Token shards (`.bin` and `.idx`): format, reader, writer, several joined as one."""
