grep ',ok,'
