"""What makes the manual: the reference from the code, the pictures, the site's hook, the judge of its prose."""
