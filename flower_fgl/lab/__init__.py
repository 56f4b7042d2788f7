"""What a researcher does with many runs: experiments, tuning, tables, figures, reports."""
