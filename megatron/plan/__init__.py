"""Plan a run: its memory, communication, time and cost, without data or a device."""
