"""From a checkpoint to a Hub repository that anybody can load: export, check, push."""
