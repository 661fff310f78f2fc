"""A page that shows stored transitions as the method sees them: python -m paw_min.page RUN."""
