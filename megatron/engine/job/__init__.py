"""Join the processes of a job, compare their settings, end all of them if one fails, and exit."""
