"""TRL trainers with lowpeak inside."""
