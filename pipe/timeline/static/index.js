export function render() { document.body.textContent = "The page comes later."; }
