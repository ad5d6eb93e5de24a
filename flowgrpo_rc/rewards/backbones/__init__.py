"""The models that several rewards score with."""
