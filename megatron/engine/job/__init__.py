"""Join the processes of a job, compare their settings, and end all processes if one fails."""
