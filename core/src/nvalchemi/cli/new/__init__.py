"""Behind ``nvalchemi hooks new``: names, answers, and a template that jinja2 renders."""
