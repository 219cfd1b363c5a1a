"""What memtools.plan says before a step runs, beside what the step then takes."""
