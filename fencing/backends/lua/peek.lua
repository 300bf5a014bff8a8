-- Who holds the resource.
-- Returns {'seen', value or false, PTTL}.
return {'seen', call('GET', KEYS[3]), call('PTTL', KEYS[3])}
