"""The batch size of recurring trainings: an optimizer over the runs of one job."""
